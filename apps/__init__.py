"""Ready-to-run recipes: YAML and launch files only, no logic."""
