"""An API of language models for programs that play episodes: requests of three dialects, and the calls of a session.

The files of data and of dialects are pure: no sockets, no tokens, no torch. `call.py` has what passes between a dialect, which
reads and writes JSON, and whoever samples.
"""
