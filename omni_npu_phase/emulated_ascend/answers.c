// SPDX-License-Identifier: Apache-2.0
//
// Everything torch_npu 2.10 and 2.13 link against besides acl.c, in two lists: calls of its start-up and shutdown that
// have one harmless answer, and calls that have none here and say so.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int aclError;
enum { OK = 0, INVALID_PARAM = 107000, NO_CONTEXT = 107002 };
extern aclError emu_unmodelled(const char *function);

// ---- one device, number 0 ----------------------------------------------------------------------------------------
static __thread int32_t current = -1;
static int opened;
static char context;

aclError aclrtSetDevice(int32_t device) {
  if (device != 0) return INVALID_PARAM;
  current = device;
  opened = 1;
  return OK;
}
aclError aclrtGetDevice(int32_t *device) {
  *device = current < 0 ? 0 : current;
  return current < 0 ? NO_CONTEXT : OK;
}
aclError aclrtGetDeviceCount(uint32_t *count) { *count = 1; return OK; }
aclError aclrtGetCurrentContext(void **out) { *out = &context; return OK; }
aclError aclrtSetCurrentContext(void *given) { (void)given; return aclrtSetDevice(0); }
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  (void)device;
  if (flags) *flags = 0;
  *active = opened;
  return OK;
}
aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logical) { *logical = user; return OK; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { (void)device; (void)peer; *can = 0; return OK; }
aclError aclrtDeviceGetBareTgid(int32_t *process) { *process = 1; return OK; }

// ---- what the device says it is ----------------------------------------------------------------------------------
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) { (void)device; (void)attribute; *value = 0; return OK; }
aclError aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { (void)device; (void)kind; *value = 24; return OK; }
aclError aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *value) { (void)device; (void)kind; *value = 24; return OK; }
aclError aclrtGetStreamResLimit(void *stream, int kind, uint32_t *value) { (void)stream; (void)kind; *value = 24; return OK; }
aclError aclrtGetResInCurrentThread(int kind, uint32_t *value) { (void)kind; *value = 24; return OK; }
// Not answered, so that torch_npu asks for the version as text instead of through a structure.
aclError aclsysGetCANNVersion(int name, void *version) { (void)name; (void)version; return INVALID_PARAM; }
aclError aclsysGetVersionStr(char *name, char *version) { (void)name; strcpy(version, "9.1.0"); return OK; }
aclError aclGetCannAttributeList(const void **list, size_t *count) { *list = NULL; *count = 0; return OK; }
// torch_npu asks for one compile option, whether operators are compiled just in time.
enum { OP_JIT_COMPILE = 10 };
static const char jit_compile[] = "disable";
size_t aclGetCompileoptSize(int option) {
  if (option == OP_JIT_COMPILE) return sizeof jit_compile;
  emu_unmodelled("aclGetCompileoptSize of another option than ACL_OP_JIT_COMPILE");
  return 0;
}
aclError aclGetCompileopt(int option, char *value, size_t room) {
  if (option != OP_JIT_COMPILE || room < sizeof jit_compile)
    return emu_unmodelled("aclGetCompileopt of another option than ACL_OP_JIT_COMPILE");
  memcpy(value, jit_compile, sizeof jit_compile);
  return OK;
}
aclError aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return OK; }

// No stream of this device is ever in capture.
aclError aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
  (void)stream;
  *status = 0;
  if (model) *model = NULL;
  return OK;
}
// Device work is done when it is issued, so a stream that waits for an event has waited.
aclError aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return OK; }
aclError aclQueryEventWaitStatus(void *event, int *status) { return aclrtQueryEventWaitStatus(event, status); }
aclError aclrtPeekAtLastError(int level) { (void)level; return OK; }
aclError aclrtGetLastError(int level) { (void)level; return OK; }

// ---- calls that only configure, log or profile, and that nothing here could tell apart -----------------------------
#define ACCEPTED(name) aclError name(void) { return OK; }
ACCEPTED(aclInit)
ACCEPTED(aclFinalize)
ACCEPTED(aclrtResetDevice)
ACCEPTED(aclSetCompileopt)
ACCEPTED(aclrtCtxSetSysParamOpt)
ACCEPTED(aclrtSetSysParamOpt)
ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSetOpExecuteTimeOut)
ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(MsprofGetHashId)
ACCEPTED(MsprofRegisterCallback)
ACCEPTED(MsprofReportAdditionalInfo)
ACCEPTED(MsprofReportApi)
ACCEPTED(MsprofReportCompactInfo)
ACCEPTED(MsprofSysCycleTime)
void aclAppLog(void) {}

// What a kernel is told about itself. Kernels that are emulated do not depend on it, and the others fail when run.
ACCEPTED(aclSetTensorDescName)
ACCEPTED(aclSetTensorFormat)
ACCEPTED(aclSetTensorPlaceMent)
ACCEPTED(aclSetTensorShape)
ACCEPTED(aclopSetAttrBool)
ACCEPTED(aclopSetAttrDataType)
ACCEPTED(aclopSetAttrFloat)
ACCEPTED(aclopSetAttrInt)
ACCEPTED(aclopSetAttrListBool)
ACCEPTED(aclopSetAttrListFloat)
ACCEPTED(aclopSetAttrListInt)
ACCEPTED(aclopSetAttrListListInt)
ACCEPTED(aclopSetAttrString)
void *aclopCreateAttr(void) { return &context; }
void aclopDestroyAttr(void *attributes) { (void)attributes; }

// ---- no answer -----------------------------------------------------------------------------------------------------
#define UNMODELLED(name) aclError name(void) { return emu_unmodelled(#name); }
UNMODELLED(HcclSetConfig)
UNMODELLED(aclGetTensorDescDimV2)
UNMODELLED(aclGetTensorDescFormat)
UNMODELLED(aclGetTensorDescNumDims)
UNMODELLED(aclGetTensorDescType)
UNMODELLED(aclmdlFinalizeDump)
UNMODELLED(aclmdlInitDump)
UNMODELLED(aclmdlSetDump)
UNMODELLED(aclopStartDumpArgs)
UNMODELLED(aclopStopDumpArgs)
UNMODELLED(aclrtBinaryGetFunction)
UNMODELLED(aclrtBinaryLoadFromData)
UNMODELLED(aclrtDeviceEnablePeerAccess)
UNMODELLED(aclrtEventElapsedTime)
UNMODELLED(aclrtFreePhysical)
UNMODELLED(aclrtGetFunctionAddr)
UNMODELLED(aclrtMallocPhysical)
UNMODELLED(aclrtMapMem)
UNMODELLED(aclrtMemExportToShareableHandle)
UNMODELLED(aclrtMemImportFromShareableHandle)
UNMODELLED(aclrtMemSetPidToShareableHandle)
UNMODELLED(aclrtProcessReport)
UNMODELLED(aclrtReleaseMemAddress)
UNMODELLED(aclrtReserveMemAddress)
UNMODELLED(aclrtUnmapMem)
UNMODELLED(rtDevBinaryRegister)
UNMODELLED(rtFunctionRegister)
UNMODELLED(rtGetC2cCtrlAddr)
UNMODELLED(rtKernelLaunch)
