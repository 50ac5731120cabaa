"""Advantages of single steps from a shared prefix against those of whole episodes, under one dense reward (SLATE).

    python benchmarks/truncated.py

Of k samples of the next step from one prefix, the advantage of each is its reward less the mean of the others'; of k
episodes, that of every turn is the episode's score less the mean of the others'. Variances are exact, and k cancels in
their ratio:

    ratio = Var(S) / mean over turns of E[Var(r_t | s_t)]

By its abstract it is up to T, the number of turns. Printed beside it is what a step's own reward leaves out: the
relative bias of the expected gradient, as `perturn check-credit` has it. `paid` rewards are those of the small
processes; `valued` ones add the exact change of the value under the policy; of games of `alfworld-like` the reward of a
turn is how much nearer the win it came, in commands of the shortest way.
"""

from collections import defaultdict
from math import fsum
from statistics import mean

import torch
from small_games import TURNS, Game, small_games

from perturn.credit_check.processes import PROCESSES, Process
from perturn.envs.alfworld.generated_games import ALFWorldLike

Chances = list[tuple[float, float]]
"""Chances, and numbers that come with them."""


def variance(chances: Chances) -> float:
    """Variance of numbers by their chances."""
    whole = fsum(chance for chance, _ in chances)
    centre = fsum(chance * number for chance, number in chances) / whole
    return fsum(chance * (number - centre) ** 2 for chance, number in chances) / whole


def of_process(process: Process, valued: bool) -> tuple[float, float, float]:
    """Ratio of variances, mean number of turns, and relative bias of single steps."""
    episodes = process.episodes
    rows, by_state, scores = [], defaultdict[tuple[int, int], Chances](list), Chances()
    for chance, steps in zip(episodes.probability.tolist(), episodes.steps, strict=True):
        values = [episodes.value(step.state, turn, 1.0) if valued else 0.0 for turn, step in enumerate(steps)]
        rewards = [
            step.reward + after - before
            for step, before, after in zip(steps, values, [*values[1:], 0.0], strict=True)
        ]
        for turn, (step, reward) in enumerate(zip(steps, rewards, strict=True)):
            by_state[step.state, turn].append((chance, reward))
        scores.append((chance, fsum(rewards)))
        rows.append(rewards + [0.0] * (process.horizon - len(steps)))
    turns = fsum(chance for own in by_state.values() for chance, _ in own)
    within = fsum(variance(own) * fsum(chance for chance, _ in own) for own in by_state.values()) / turns
    padded = torch.tensor(rows, dtype=torch.float64)
    found = torch.einsum("e,et,etp->p", episodes.probability, padded, episodes.score)
    return variance(scores) / within, turns, bias_of(found, episodes.gradient(1.0))


def bias_of(found: torch.Tensor, true: torch.Tensor) -> float:
    """Rest that no positive factor makes up for, relative to the true gradient; infinite where it points away."""
    scale = float(found @ true / (true @ true))
    return float((found - scale * true).norm() / (scale * true.norm())) if scale > 0 else float("inf")


def of_game(game: Game) -> tuple[float, float]:
    """Ratio of variances on a game of so many turns at most, and their mean number."""
    at: dict[str, float] = {game.start: 1.0}
    ends, within, turns = Chances(), 0.0, 0.0
    for _ in range(TURNS):
        after: dict[str, float] = defaultdict(float)
        for key, chance in at.items():
            options = [game.after(key, command) for command in game.options(key)]
            nearer = [(1.0, float(left(game, key) - left(game, other))) for other in options]
            within += chance * variance(nearer)
            turns += chance
            for other in options:
                after[other] += chance / len(options)
        ends.append((after.pop("won", 0.0), 0.0))
        at = after
    ends += [(chance, -float(left(game, key))) for key, chance in at.items()]
    return variance(ends) / (within / turns), turns


def left(game: Game, key: str) -> int:
    """Commands of the shortest way from a state."""
    found = ALFWorldLike().remaining(game.task, game.commands(key), "shortest")[-1]
    assert found is not None
    return found


def main() -> None:
    """Print the ratios."""
    print(f"{'ground':<22}{'ratio':>8}{'turns':>8}{'bias':>8}")
    for process in PROCESSES:
        for valued in (False, True):
            name = f"{process.name}, {'valued' if valued else 'paid'}"
            ratio, turns, bias = of_process(process, valued)
            print(f"{name:<22}{ratio:>8.2f}{turns:>8.2f}{bias:>8.3f}")
    found = [of_game(game) for game in small_games(6)]
    ratios, turns = zip(*found, strict=True)
    print(
        f"6 games: ratio {mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {mean(turns):.1f} turns"
    )


if __name__ == "__main__":
    main()
