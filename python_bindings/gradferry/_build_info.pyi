"""Types of the module that CMake writes into the installed package."""

GRADFERRY_VERSION: str
WIRE_VERSION: int
TORCH_VERSION: str
PYTHON_VERSION: str
COMPILER: str
CUDA_COMPILER: str  # empty where there are no CUDA kernels
CUDA_ARCHITECTURES: str
