"""Local web pages of the runs in a folder: episodes, reasons for changes of the reward, and time accounts."""
