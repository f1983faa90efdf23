"""Conversations of a dataset, for supervised fine-tuning (`method: sft`) or for reproducing the last answer."""

from environments.conversations.environment import Conversations, ConversationsConfig

__all__ = ["Conversations", "ConversationsConfig"]
