"""What is kept from frame to frame."""
