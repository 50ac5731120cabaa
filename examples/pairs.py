"""Offline training on ten pairs of a good and a bad episode, in TRL's conversational format.

    python examples/pairs.py

Replace `pairs` by your own rows, and `tiny-agent` by your model. The script takes a few seconds on a laptop.
"""

from perturn import TurnConfig, TurnTrainer

ROOMS = ["kitchen", "hall", "garden", "cellar", "attic", "study", "bathroom", "garage", "bedroom", "office"]


def pair(room):
    """Return one row: the task, an episode that solves it, and an episode that does not."""
    task = {"role": "user", "content": f"Find the mug. It is in the {room}. What do you do?"}
    good = [
        {"role": "assistant", "content": f"go to {room}"},
        {"role": "user", "content": f"You are in the {room}. You see a mug 1."},
        {"role": "assistant", "content": "take mug 1"},
    ]
    return {"prompt": [task], "chosen": good, "rejected": [{"role": "assistant", "content": "look"}]}


def main(output="aligned", epochs=4):
    """Train, print the margin between the two sides before and after, and save the policy."""
    pairs = [pair(room) for room in ROOMS]
    args = TurnConfig(
        output_dir=output,
        loss={"name": "tlm-dre"},  # or dpo, dmpo, dil; each loss brings the credit of its paper
        num_train_epochs=epochs,
        learning_rate=1e-4,
        per_device_train_batch_size=5,
    )
    trainer = TurnTrainer("tiny-agent", args, train_dataset=pairs, eval_dataset=pairs)
    margins = [trainer.evaluate()["eval_rewards/margins"]]
    trainer.train()
    margins.append(trainer.evaluate()["eval_rewards/margins"])
    trainer.save_model()
    print(f"margin of the good episodes, in nats: {margins[0]:.3f} before, {margins[1]:.3f} after")
    print(f"the policy is in {output}: perturn evaluate --model {output} --environment alfworld-like")
    return margins


if __name__ == "__main__":
    main()
