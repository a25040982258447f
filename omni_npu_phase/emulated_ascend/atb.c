// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for libatb.so, the part of CANN's NNAL that torch_npu links its plug-in of ATB operators against: with it
// the plug-in loads and registers its schemas. No operation can be made; models.py has those that are used.
extern int emu_unmodelled(const char *function);

// Names as a C++ compiler makes them.
#define UNMODELLED(name) long name(void) { return emu_unmodelled(#name); }
UNMODELLED(_ZN3atb13CreateContextEPPNS_7ContextE)
UNMODELLED(_ZN3atb14DestroyContextEPNS_7ContextE)
UNMODELLED(_ZN3atb16DestroyOperationEPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE)
UNMODELLED(_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE)

// Asked on the way to an operation, which then cannot be made.
unsigned long _ZN3atb5Utils13GetTensorSizeERKNS_6TensorE(void) { return 0; }
