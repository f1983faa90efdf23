"""Transfer of weights from the trainer to the generators."""
