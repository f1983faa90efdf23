"""The only room that knows Monarch: actors, services, processes."""
