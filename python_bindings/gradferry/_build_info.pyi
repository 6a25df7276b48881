"""Types of the module that CMake writes into the installed package."""

GRADFERRY_VERSION: str  # of the sources, such as "0.2.0"
PACKAGE_VERSION: str  # such as "0.2.0+torch2.15"
WIRE_VERSION: int
TORCH_VERSION: str
OLDEST_TORCH: str  # that these sources support, such as "2.11"
NEWEST_TORCH: str
PYTHON_VERSION: str
COMPILER: str
CUDA_COMPILER: str  # empty where there are no CUDA kernels
CUDA_ARCHITECTURES: str
