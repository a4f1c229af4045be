"""The formats of exported models, a module each. ``visdet.export`` says what such a module has."""
