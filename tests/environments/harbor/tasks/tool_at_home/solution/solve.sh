#!/bin/bash
mkdir -p ~/.local/bin
printf '#!/bin/sh\nexec tr a-z A-Z\n' > ~/.local/bin/shout
chmod +x ~/.local/bin/shout
ln -sf ~/.local/bin/shout /data/shout
