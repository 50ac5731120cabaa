"""Long episodes, and chat templates whose rendering depends on earlier messages."""

from perturn.types import Action, Task, Trajectory, Turn

SYSTEM = ({"role": "system", "content": "Play well."},)


REMEMBERS = (
    "{% set ns = namespace(lamp=false) %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + ('!' if ns.lamp and m['role'] == 'user' else '') + '\n'"
    " + m['content'] + '<|im_end|>\n' }}"
    "{% if 'lamp' in m['content'] %}{% set ns.lamp = true %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template that is append-only until a lamp is seen. After it, the user's messages are rendered differently."""


SECOND = REMEMBERS.replace("m['role'] == 'user'", "'lamp' in m['content']")
"""Template that is append-only, except that every lamp after the first is rendered differently in its own message."""


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
