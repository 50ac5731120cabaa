"""Messages between the main process and an environment's process, through a socket that never blocks.

A message is its length, as an unsigned integer of eight bytes, and then its bytes.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

HEAD = struct.Struct("!Q")
LARGEST = 2**28
"""Largest accepted answer, in bytes."""
_SOME = 2**20


class Garbled(Exception):
    """The child process sent something other than one valid answer. The message describes it."""


class Pipe:
    """Main process's end of the socket: it sends a message and receives the answer, in parts and without blocking."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.unsent = memoryview(b"")
        self._got = bytearray()

    def post(self, message: bytes) -> None:
        """Set the message that the next calls of `exchange` send."""
        self.unsent = memoryview(HEAD.pack(len(message)) + message)

    def exchange(self) -> bytes | None:
        """Send a part of the message and read a part of the answer.

        Memory is allocated only for received bytes, whatever length the answer announces.

        Returns:
            The answer once it is complete, else None.

        Raises:
            EOFError: If the pipe is closed; some systems raise OSError.
            Garbled: If the answer is too large, or more than one answer arrives.
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
