"""The trainer: TorchTitan's models, optimizers and schedules behind a small interface."""
