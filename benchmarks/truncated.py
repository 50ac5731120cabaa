"""Compare advantages of single steps from a shared prefix with advantages of whole episodes (SLATE).

    python benchmarks/truncated.py

With k samples of the next step from one prefix, the advantage of a sample is its reward minus the mean reward of the
others. With k episodes, the advantage of every turn is the episode's score minus the mean score of the others.
Variances are exact, and k cancels in their ratio:

    ratio = Var(S) / mean over turns of E[Var(r_t | s_t)]

According to the paper's abstract, the ratio is up to T, the number of turns. A step's own reward leaves out its later
effects. So the command also prints the relative bias of the expected gradient, as in `perturn check-credit`. `paid`
uses the rewards of the small processes. `valued` adds the exact change of the value under the policy. In games of
`alfworld-like`, the reward of a turn is the decrease of the distance to the win, in commands.
"""

from collections import defaultdict
from math import fsum
from statistics import mean

import torch
from small_games import TURNS, Game, small_games

from perturn.credit_check.processes import PROCESSES, Process
from perturn.envs.alfworld.generated_games import ALFWorldLike

Chances = list[tuple[float, float]]
"""Pairs of a probability and a number."""


def variance(chances: Chances) -> float:
    """Return the variance of numbers under their probabilities."""
    whole = fsum(chance for chance, _ in chances)
    centre = fsum(chance * number for chance, number in chances) / whole
    return fsum(chance * (number - centre) ** 2 for chance, number in chances) / whole


def of_process(process: Process, valued: bool) -> tuple[float, float, float]:
    """Return the ratio of variances, the mean number of turns, and the relative bias of single steps."""
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
    """Return the relative error of a gradient after the best positive scaling; infinite if it points away."""
    scale = float(found @ true / (true @ true))
    return float((found - scale * true).norm() / (scale * true.norm())) if scale > 0 else float("inf")


def of_game(game: Game) -> tuple[float, float]:
    """Return the ratio of variances in a game, and its mean number of turns."""
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
    """Return the number of commands on the shortest way from a state to the win."""
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
