"""Small agents that learn to write Python with a tool."""
