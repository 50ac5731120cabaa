"""Messages between us and a world's process: eight bytes of length, then as many bytes. Our end never waits."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

HEAD = struct.Struct("!Q")
LARGEST = 2**28
"""Bytes of the largest answer that is taken."""
_SOME = 2**20


class Garbled(Exception):
    """The child sent something other than an answer, which is in the text."""


class Pipe:
    """Our end: sends one message and receives one in return, as far as each goes at the moment."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.unsent = memoryview(b"")
        self._got = bytearray()

    def post(self, message: bytes) -> None:
        """Have a message sent by the next calls of `exchange`."""
        self.unsent = memoryview(HEAD.pack(len(message)) + message)

    def exchange(self) -> bytes | None:
        """Send a part of the message and read a part of the answer; return the answer once it is complete.

        What an answer says of its length takes no memory.

        Raises:
            EOFError: If the pipe is closed; OSError likewise.
            Garbled: If it is too large, or not one answer.
        """
        if self.unsent:
            with suppress(BlockingIOError):
                self.unsent = self.unsent[self.end.send(self.unsent[:_SOME]) :]
        with suppress(BlockingIOError):
            some = self.end.recv(_SOME)
            if not some:
                raise EOFError
            self._got += some
        if len(self._got) < HEAD.size:
            return None
        (length,) = HEAD.unpack_from(self._got)
        if length > LARGEST:
            raise Garbled(f"an answer of {length} bytes, more than {LARGEST}")
        if len(self._got) < HEAD.size + length:
            return None
        if len(self._got) > HEAD.size + length or self.unsent:
            raise Garbled("more than one answer")
        message = bytes(self._got[HEAD.size :])
        self._got.clear()
        return message
