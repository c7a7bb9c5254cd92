"""Family ``store``: a key-value store in which keys are overwritten, and a stale value is a trap.

A statement is ``Ca5``: at time C, 5 is written under key a. The query ``ad:K`` asks for the values of a and d after
time K, the last one. For every key the chain reads the log backwards, newest first, until it meets the key:
``?aKb3a/;Jc2a/;Ia7a!=a7;`` (label, key and value of the entry, key that is looked for, / for no or ! for yes). The
chain needs the prompt over and over, and little of itself; without entry I, the stale entry C would be taken for the
answer.
"""

from __future__ import annotations

from random import Random

from kvcompress.reasoner.text import NAMES, Draft, label_range, step


def store(rng: Random, difficulty: int, redundancy: int) -> Draft:
    """A log in order of time, about three entries for each key."""
    entries_wanted, steps_wanted = store_size(difficulty)
    labels = label_range(rng, entries_wanted)
    keys = rng.sample(NAMES, max(2, round(len(labels) / 2.5)))
    log = [(label, rng.choice(keys), rng.randint(0, 9)) for label in labels]
    newest = {key: index for index, (_, key, _) in enumerate(log)}

    asked: list[str] = []
    chain: list[str] = []
    results: list[str] = []
    steps = 0
    for key in rng.sample(sorted(newest), len(newest)):
        asked.append(key)
        chain.append(f"?{key}")
        for label, found, value in reversed(log[newest[key] :]):
            entry = f"{found}{value}{key}"
            if found == key:
                results.append(f"{key}{value}")
                chain.append(step(f"{label}{entry}!={results[-1]}", (f"{entry}!={results[-1]}",), redundancy))
            else:
                chain.append(step(f"{label}{entry}/", (f"{entry}/",), redundancy))
            steps += 1
        if steps >= steps_wanted:
            break
    chain.append("?:")
    statements = tuple(f"{label}{key}{value}" for label, key, value in log)
    return Draft(statements, "".join(asked) + ":" + labels[-1], "".join(chain), "".join(results))


def store_size(difficulty: int) -> tuple[int, int]:
    """Entries of the log, and steps of the chain from which on no further key is asked."""
    return 3 + difficulty, 3 * difficulty - 2
