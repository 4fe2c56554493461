#!/usr/bin/env bash
# From nothing to a trained network, its evaluation and an answered search on a laptop CPU, in minutes after downloads:
#   bash scripts/quickstart.sh
# Needs Python >= 3.10 and pip. Run again, it reuses the environment, the data, the checkpoints and what was made of the newest one.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment requirements.txt
started=$SECONDS

run=work_dirs/demo_cpu
echo "== 1/4 demo data: drawn faces in RecordIO, three verification sets, people to enrol and to search"
./face demo_data --out datasets/demo
echo "== 2/4 training in two processes, half of the identities in each (continues where an interrupted run stopped)"
./face train demo_cpu --processes 2
newest=$(ls -d "$run"/checkpoints/step_* | tail -n 1)
if [ "$run/demo.gallery" -nt "$newest/manifest.json" ]; then
    echo "== 3/4 evaluation and gallery of $newest: there already"
else
    echo "== 3/4 evaluation of $newest, pictures, and a gallery of eight people who were not in training"
    ./face eval "$run" --precision auto --report "$run/evaluation"
    ./face compare "$run" --out "$run/comparison"
    rm -f "$run/demo.gallery" "$run"/.unfinished.gallery*
    ./face enrol "$run" "$run/.unfinished.gallery" datasets/demo/people
    mv "$run/.unfinished.gallery" "$run/demo.gallery"
fi
echo "== 4/4 search: who are the visitors? Two of them are strangers"
./face search "$run" "$run/demo.gallery" datasets/demo/visitors --k 1 --far 1e-2 --sheet "$run/search.png"
cat <<TEXT

Done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s. What there is to look at:
  the faces          datasets/demo/preview.png
  training curves    $run/comparison/comparison.png
  evaluation         $run/evaluation/report.html   (ROC, thresholds, the worst errors)
  the search         $run/search.png
  numbers            $run/evaluation/results.md, $run/metrics.jsonl
  log                $run/train.log
What to type next:
  ./face                                                       # all programs
  ./face doctor                                                # what this machine has for training
  ./face serve $run --gallery $run/demo.gallery                # a page to try the network on
  ./face train demo_cpu run.name=adaface loss.name=adaface     # the same with another loss
  ./face compare $run work_dirs/adaface
  $(dirname "$PYTHON")/tensorboard --logdir work_dirs
TEXT
