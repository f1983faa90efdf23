"""HTTP server that gives programs with their own agent loop access to an episode's model (`server`)."""
