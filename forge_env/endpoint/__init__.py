"""Models behind OpenAI-compatible endpoints as policies."""
