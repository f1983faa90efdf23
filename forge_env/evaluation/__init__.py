"""Evaluation of any policy on any environments; the results folder contains the transcripts behind every number.

config --> plan of samples --> runner --> store (append-only JSONL) --> summary, tables, comparison
                                 |  \\
                        policy, metered   sandboxes, watched
"""
