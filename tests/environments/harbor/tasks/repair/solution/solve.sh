#!/bin/bash
set -e
sed -i -f "$(dirname "$0")/parts/repair.sed" "$PROGRAM"
