"""The dual-copy quantizer against a plain copy, the torch version and Transformer Engine's cast, in one run.

python -m fxshard.bench.quantize --rows 16384 --columns 8192 --json quantize.json
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxshard.bench.clock import DeviceClock, take_turns
from fxshard.bench.harness import Column, Row, Table, parser_of, write
from fxshard.kernels.mxfp8 import BLOCK, COLUMNWISE, ROWWISE, quantize
from fxshard.kernels.quantize import quantize_both, runs_on

ROUNDS, REPEATS = 10, 10


COLUMNS = (
    Column("milliseconds", "ms", ".3f", bars="both copies", unit="ms"),
    Column("bandwidth", "TB/s", ".2f"),
    Column("of_copy", "of the copy's", ".2f"),
)


def measure(rows: int, columns: int) -> list[Row]:
    """All contenders on one bf16 matrix, in turns: every round times each of them once. Bandwidth is that of the bytes
    that have to be moved."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(value)
    both_copies = value.numel() * 2 + 2 * (value.numel() + value.numel() // BLOCK)
    contenders: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: other.copy_(value), 2 * value.numel() * 2),
        "fxshard": (lambda: quantize_both(value), both_copies),
        "torch": (lambda: (quantize(value, ROWWISE), quantize(value, COLUMNWISE)), both_copies),
    }
    cast = transformer_engine_cast(value) if value.is_cuda else None
    if cast is not None:
        contenders["transformer engine"] = (cast, both_copies)
    clock, repeats = DeviceClock(device), REPEATS if value.is_cuda else 1
    runs = {name: run for name, (run, _) in contenders.items()}
    times = take_turns(runs, lambda run: clock.milliseconds(run, repeats), ROUNDS)
    speed = {name: size / times[name] / 1e9 for name, (_, size) in contenders.items()}
    return [
        {"name": name, "milliseconds": times[name], "bandwidth": speed[name], "of_copy": speed[name] / speed["copy"]}
        for name in contenders
    ]


def transformer_engine_cast(value: torch.Tensor) -> Callable[[], object] | None:
    """TE's cast of a master weight to both copies (largest values, scales, payloads); None where TE cannot be used."""
    try:
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.optimizers import multi_tensor_applier
        from transformer_engine.pytorch.tensor import utils
    except Exception as error:  # TE fails to import in many ways, few of them ImportError
        print(f"without Transformer Engine: {error}")
        return None
    rows, columns = value.shape
    made = te.MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty((rows, columns), dtype=value.dtype, device=value.device)
    scales = [made._rowwise_scale_inv, made._columnwise_scale_inv]
    largest = [torch.zeros(s.shape, device=value.device, dtype=value.dtype) for s in scales]
    data = [made._rowwise_data.view(-1), made._columnwise_data.view(-1)]

    def cast() -> None:
        tex.mxfp8_scaling_compute_partial_amax(value.view(-1), *largest, rows, columns, 0)
        multi_tensor_applier(utils.multi_tensor_compute_scale_inv_e8m0, None, [largest, scales])
        tex.mxfp8_scaling_partial_cast(value.view(-1), *data, *scales, rows, columns, 0)

    return cast


def main() -> None:
    parser = parser_of(__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=16384 if cuda else 1024)
    parser.add_argument("--columns", type=int, default=8192 if cuda else 512)
    options = parser.parse_args()
    if cuda and not runs_on(torch.device("cuda")):
        parser.error("needs a CUDA device of compute capability 8.9 or more, and Triton")
    name = torch.cuda.get_device_name() if cuda else "CPU, where fxshard is the torch version"
    title = f"{name}, {options.rows} × {options.columns} bf16 to both MXFP8 copies"
    table = Table(title, COLUMNS, measure(options.rows, options.columns), "copy")
    print(table)
    write(options.json, [table])


if __name__ == "__main__":
    main()
