"""Other frameworks' environments here, and ours there: OpenEnv (both ways) and verifiers."""
