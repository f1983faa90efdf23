"""Tests of sandbox engines: an audit with hostile programs, and a conformance suite for every engine."""
