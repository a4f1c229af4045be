// What the CUDA library was compiled with and for, as visdet.ops.build_info() reports it. setup.py defines the text:
// "toolkit=13.0 native=7.5,8.0,9.0 ptx=9.0".
extern "C" __attribute__((visibility("default"))) const char* visdet_cuda_build() { return VISDET_CUDA_BUILD; }
