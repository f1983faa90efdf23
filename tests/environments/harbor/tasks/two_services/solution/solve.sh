#!/bin/bash
echo "Hello, harbor!" > hello.txt
