"""The persistent runner: the program inside a sandbox that executes one request after another.

It consists of two processes, so that no request can read another's code or answers from inherited memory:

    engine <--frames--> supervisor <--commands--> zygote --fork--> one child per request
                        holds the channel         preloads modules,
                        and every request's       never sees a request
                        bytes; never forks
                        user code

It uses the standard library only and supports Python 3.9 and newer, since it also runs in users' images.
"""
