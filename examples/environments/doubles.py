"""A taskset of verifiers: sums of a number with itself. It is installed beside verifiers, where Onbeat is not."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Double(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply.split())


class Doubles(vf.Taskset[Double, vf.TasksetConfig]):
    def load(self) -> Iterator[Double]:
        for number in range(2, 50):
            yield Double(Data(prompt=f"What is {number} + {number}?", answer=2 * number), self.config.task)


__all__ = ["Doubles"]
