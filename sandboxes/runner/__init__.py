"""The persistent runner: the program that lives inside a sandbox and executes one request after another.

Two processes, so that no request can read another's code or answers out of inherited memory:

    engine <--frames--> supervisor <--commands--> zygote --fork--> one child per request
                        holds the channel         preloads modules,
                        and every request's       never sees a request
                        bytes; never forks
                        user code

Standard library only, Python 3.9 and newer: it also runs in images that a user brings.
"""
