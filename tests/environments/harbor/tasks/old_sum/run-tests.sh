#!/bin/bash
python3 $TEST_DIR/outputs.py
