"""What `forge-env validate` proves of an environment, without a model."""
