"""Policy-gradient losses, one small class each, and their components."""

from trainers.losses.corrections import TIS, Decoupled, IcePop
from trainers.losses.grpo import DAPOLoss, DrGRPOLoss, GRPOLoss, GSPOLoss, SimpleGRPOLoss
from trainers.losses.policy import PolicyLoss, Surrogate
from trainers.losses.sft import SFTLoss
from trainers.losses.types import Loss, LossOutput, Needs, TokenBatch
from trainers.losses.weighted import CISPOLoss, ReinforceLoss, SAPOLoss

__all__ = [
    "TIS",
    "CISPOLoss",
    "DAPOLoss",
    "Decoupled",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "IcePop",
    "Loss",
    "LossOutput",
    "Needs",
    "PolicyLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SFTLoss",
    "SimpleGRPOLoss",
    "Surrogate",
    "TokenBatch",
]
