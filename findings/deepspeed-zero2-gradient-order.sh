#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, gloo on two CPU ranks, ZeRO-2.
#
# Seen: two ranks use the same four weights in another order, so their gradients come in another order in the backward
# pass. DeepSpeed lays gradients side by side as they come and adds the buffers of both ranks, so weights end with sums
# of gradients of different weights. There is no error and no warning; with the same order the means are right.
# Expected: the mean of each weight's own gradients, as ZeRO-1 gives, or an error.
# Why it matters: the order is the graph's, so whatever depends on a rank's data (branches, texts of other lengths, a
# schedule chosen by size) can mix gradients silently.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q deepspeed==0.19.8 setuptools numpy
cat >"$folder/step.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist

stage, orders = int(sys.argv[1]), {"same": [(0, 1, 2, 3)] * 2, "other": [(0, 1, 2, 3), (3, 1, 0, 2)]}[sys.argv[2]]


class Used(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(n + 1) for n in range(4)])

    def forward(self, order):
        total = torch.zeros(())
        for n in order:
            total = (total + (self.weights[n] * (n + 1)).sum()) * 1.0
        return total


deepspeed.init_distributed("gloo")
model = Used()
config = {
    "train_batch_size": 2, "gradient_clipping": 1e9, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": False},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
engine.backward(engine(orders[dist.get_rank()]))
engine.step()
right = all(torch.equal(weight, torch.full_like(weight, -(n + 1.0))) for n, weight in enumerate(model.weights))
if dist.get_rank() == 0:
    print(f"ZeRO-{stage}, {sys.argv[2]} order on both ranks:", [weight.tolist() for weight in model.weights], flush=True)
sys.exit(0 if right else 3)
PYTHON
# Each weight n has the gradient n + 1 on both ranks, so it must end at -(n + 1).
run() {
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc_per_node 2 --master_port "$3" \
        "$folder/step.py" "$1" "$2" 2>"$folder/errors"
}
run 1 other 29811 || { cat "$folder/errors"; echo "changed: ZeRO-1 is wrong, or did not run"; exit 1; }
run 2 same 29812 || { cat "$folder/errors"; echo "changed: ZeRO-2 is wrong in the same order, or did not run"; exit 1; }
if run 2 other 29813; then echo "changed: ZeRO-2 is right in another order"; exit 1; fi
grep -q "exitcode *: 3" "$folder/errors" || { cat "$folder/errors"; echo "changed: another failure"; exit 1; }
echo "as described: ZeRO-2 mixed the gradients of different weights"
