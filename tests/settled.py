"""What `train.precision: auto` and `train.compile: auto` are on a CPU."""

FP32 = {"precision": "fp32", "compile": False}
