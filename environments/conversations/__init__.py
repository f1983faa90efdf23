"""Conversations of a dataset, to be learned (`method: sft`), or of which the last answer is to be given again."""

from environments.conversations.environment import Conversations, ConversationsConfig

__all__ = ["Conversations", "ConversationsConfig"]
