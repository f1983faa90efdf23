"""Sandbox engines (Docker, Kubernetes, local namespaces) and the runner that executes code inside a sandbox."""
