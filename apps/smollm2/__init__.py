"""A real language model that learns on two CPU cores."""
