"""The Kubernetes engine: pods, each with a persistent runner inside."""

from sandboxes.kubernetes.engine import KubernetesEngine

__all__ = ["KubernetesEngine"]
