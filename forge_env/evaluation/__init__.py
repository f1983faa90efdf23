"""Evaluating any policy on any environments: one folder of results, every number backed by its transcripts.

config --> plan of samples --> runner --> store (append-only JSONL) --> summary, tables, comparison
                                 |  \\
                        policy, metered   sandboxes, watched
"""
