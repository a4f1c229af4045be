"""What can go wrong in an export."""

from visdet.errors import UserError


class ExportError(UserError):
    """A model that cannot be exported as it was asked, or an export that gives other results than the model."""
