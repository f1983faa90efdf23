"""Small models that learn from large ones, by what they sample themselves."""
