#!/usr/bin/env bash
# From nothing to a trained, evaluated face recognition network on a laptop CPU, in under ten minutes after the downloads:
#   bash scripts/quickstart.sh
# Needs Python >= 3.10 and pip. Run again, it reuses the environment, the data and the checkpoints.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment requirements.txt
started=$SECONDS

run=work_dirs/demo_cpu
echo "== 1/4 demo data: drawn faces in RecordIO, three verification sets"
./face demo_data --out datasets/demo
echo "== 2/4 training in two processes, half of the identities in each (continues where an interrupted run stopped)"
./face train demo_cpu --processes 2
echo "== 3/4 evaluation of the newest checkpoint"
./face eval "$run" --precision auto --report "$run/evaluation"
echo "== 4/4 pictures"
./face compare "$run" --out "$run"
cat <<TEXT

Done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s. What there is to look at:
  the faces          datasets/demo/preview.png
  training curves    $run/comparison.png
  evaluation         $run/evaluation/report.html   (ROC, thresholds, the worst errors)
  numbers            $run/evaluation/results.md, $run/metrics.jsonl
  log                $run/train.log
What to type next:
  ./face                                                       # all programs
  ./face doctor                                                # what this machine has for training
  ./face train demo_cpu run.name=adaface loss.name=adaface # the same with another loss
  ./face compare $run work_dirs/adaface --out comparison
  $(dirname "$PYTHON")/tensorboard --logdir work_dirs
TEXT
