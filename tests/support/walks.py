"""Long episodes, and templates that remember what was said before."""

from perturn.types import Action, Task, Trajectory, Turn

SYSTEM = ({"role": "system", "content": "Play well."},)


REMEMBERS = (
    "{% set ns = namespace(lamp=false) %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + ('!' if ns.lamp and m['role'] == 'user' else '') + '\n'"
    " + m['content'] + '<|im_end|>\n' }}"
    "{% if 'lamp' in m['content'] %}{% set ns.lamp = true %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Append-only, but once a lamp is seen the user's messages are written otherwise."""


SECOND = REMEMBERS.replace("m['role'] == 'user'", "'lamp' in m['content']")
"""Append-only, but every lamp after the first is written otherwise, which shows in its own message alone."""


def played(turns, lamp=(), prompt=SYSTEM, **action):
    return Trajectory(
        Task("t/1"),
        tuple(
            Turn(
                ({"role": "user", "content": f"room {k}" + " with a lamp" * (k in lamp)},),
                Action(f"go to door {k}", **action),
            )
            for k in range(turns)
        ),
        prompt=prompt,
    )
