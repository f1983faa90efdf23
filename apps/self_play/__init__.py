"""Self-play: models that learn games by playing against themselves."""
