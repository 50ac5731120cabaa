"""A stand-in for a server of the chat-completions protocol, and prompts to ask it."""

import threading
import time
from dataclasses import dataclass, field

from perturn.types import Prompt, Sampling

KEY = "sk-planted-9f8e7d6c5b4a39281706"


SAMPLING = Sampling(temperature=0.5, max_new_tokens=20)


def completion(text="Thought: t\nAction: a", finish="stop", tokens=(10, 5), **message):
    """A 200 of the protocol."""
    return 200, {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text, **message},
            }
        ],
        "usage": {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[1],
            "total_tokens": sum(tokens),
        },
    }


def refusal(status, message="no", code=None, **headers):
    """An error of the protocol."""
    return status, {"error": {"message": message, "type": "t", "code": code}}, headers


@dataclass
class Server:
    """What the server was asked, and what it answers: `reply` is given the body and the number of the request."""

    url: str = ""
    reply: object = lambda body, number: completion()
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    times: list = field(default_factory=list)
    answered: int = 0
    busy: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path, headers, body):
        """Note a request, and answer it."""
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self.busy += 1
            self.peak = max(self.peak, self.busy)
        ours = path == "/v1/chat/completions"
        status, answer, *rest = self.reply(body, number) if ours else refusal(404, f"no {path}")
        with self.lock:
            self.busy -= 1
            self.answered += status == 200
        return status, answer, *rest


def user(text):
    return {"role": "user", "content": text}


def prompt(name="a", turns=(), heard="go", seed=0, tools=()):
    return Prompt(({"role": "system", "content": "Play."},), tuple(turns), (user(heard),), seed, name, tools)


def prompts(count):
    return [prompt(str(number), heard=f"go {number}", seed=number) for number in range(count)]


def heard(body):
    """The newest observation of a request."""
    return body["messages"][-1]["content"]


def put(data, place, value):
    """The data with another value at a place."""
    if not place:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[place[0]] = put(copy[place[0]], place[1:], value)
    return copy
