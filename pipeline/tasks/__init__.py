"""Harbor tasks: reading them, and making them."""
