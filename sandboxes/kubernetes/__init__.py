"""The Kubernetes engine: pods with a persistent runner inside."""

from sandboxes.kubernetes.engine import KubernetesEngine

__all__ = ["KubernetesEngine"]
