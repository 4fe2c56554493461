"""Export a network to ONNX, torch.export or OpenVINO: face export [RUN] --out FILE

The file takes a batch of any size. Its metadata has the input contract: size, colour order, mean, std, alignment points, length
of the embeddings, and which weights they are. With --with-preprocess the file takes bytes, (batch, S, S, 3) uint8 RGB, and
returns unit vectors and their former lengths. Batch normalisations are folded into the layer before them where that is exact.

FILE appears only if it gives the embeddings of the network: batches of 1, 2 and 7 images may differ by 1e-4 of the length of an
embedding at most. --precision fp16 and int8 are compared by their accuracy on verification sets instead. int8 takes the ranges
of its activations from the images of a set, --calibrate, by default the run's training set.

Examples:
  face export --out demo.onnx
  face export work_dirs/demo_cpu --to onnx --out demo.onnx --with-preprocess
  face export backbone.pth --backbone r50 --to onnx --out r50_int8.onnx --precision int8 --calibrate people
  face export work_dirs/demo_cpu --to onnx --out demo.onnx --measure --json demo.json
  face export work_dirs/ms1mv3_r50 --pack insightface --out ~/.insightface/models/mine/recognition.onnx
  face export work_dirs/ms1mv3_r50 --pack hub --fields card/card.yaml --out my_network
"""

from pathlib import Path

from deploy.export.export import SUFFIXES, export
from eval.networks import add_choice_of_network
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face export", __doc__)
    add_choice_of_network(parser, newest=True)
    parser.add_argument("--to", choices=tuple(SUFFIXES), help="form of the file (default: as the name of FILE ends)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, .onnx, .pt2 or .xml (OpenVINO)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    packs = "insightface: what its get_model and FaceAnalysis take; hub: a folder, FILE, with card, weights, ONNX and examples"
    parser.add_argument("--pack", choices=("insightface", "hub"), help=packs)
    parser.add_argument("--results", type=Path, metavar="FILE", help="for the card of --pack hub: see face card")
    parser.add_argument("--fields", type=Path, metavar="FILE", help="for the card of --pack hub: see face card")
    parser.add_argument("--with-preprocess", action="store_true", help="take (batch, S, S, 3) uint8 RGB, return unit vectors")
    parser.add_argument("--flip", action="store_true", help="add the embedding of the mirror image, as the evaluation does")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp32", help="of weights and arithmetic")
    images = "for int8: images for the ranges of activations, a set, folders of people or a list (default: the training set)"
    parser.add_argument("--calibrate", type=Path, metavar="SET", help=images)
    parser.add_argument("--calibration-images", type=int_in_range(1, 100_000), default=256, metavar="N", help="images of it")
    parser.add_argument("--targets", nargs="+", metavar="SET", help="verification sets; default: those of the run's config")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with NAME.bin; default: that of the run's config")
    parser.add_argument("--max-loss", type=float, metavar="POINTS", help="write no file that loses more accuracy, in percent")
    parser.add_argument("--measure", action="store_true", help="print a table of sizes, accuracies and times of all precisions")
    parser.add_argument("--measure-batch", type=int_in_range(2, 1024), default=16, metavar="B", help="its larger batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what is printed as JSON")
    parser.add_argument("--batch-size", type=int_in_range(1, 4096), default=256, help="images per batch of the evaluation")
    parser.add_argument("--threads", type=int_in_range(1, 1024), default=2, help="threads of decoding and of each network")
    return run_main(export, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
