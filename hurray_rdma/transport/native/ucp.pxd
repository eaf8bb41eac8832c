# Every declaration of UCX that the module uses (ucp/api/ucp.h of libucx, API 1.19 and later).
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdio cimport FILE

cdef extern from "ucs/type/status.h" nogil:
    ctypedef enum ucs_status_t:
        UCS_OK
        UCS_ERR_NO_MEMORY
        UCS_ERR_UNSUPPORTED
        UCS_ERR_UNREACHABLE
    const char *ucs_status_string(ucs_status_t status)

cdef extern from "ucs/memory/memory_type.h" nogil:
    ctypedef enum ucs_memory_type_t:
        UCS_MEMORY_TYPE_HOST
        UCS_MEMORY_TYPE_CUDA
        UCS_MEMORY_TYPE_CUDA_MANAGED
        UCS_MEMORY_TYPE_UNKNOWN

cdef extern from "ucp/api/ucp.h" nogil:
    ctypedef void *ucp_context_h
    ctypedef void *ucp_worker_h
    ctypedef void *ucp_ep_h
    ctypedef void *ucp_mem_h
    ctypedef void *ucp_rkey_h
    ctypedef void *ucs_status_ptr_t

    enum:
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS
        UCP_MEM_MAP_PARAM_FIELD_LENGTH
        UCP_MEM_MAP_PARAM_FIELD_FLAGS
        UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE
        UCP_MEM_MAP_ALLOCATE
        UCP_MEM_ATTR_FIELD_ADDRESS
        UCP_MEM_ATTR_FIELD_LENGTH
        UCP_MEM_ATTR_FIELD_MEM_TYPE

        UCP_ATTR_FIELD_MEMORY_TYPES

        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
        UCP_EP_PARAM_FIELD_ERR_HANDLER

    ctypedef enum ucp_err_handling_mode_t:
        UCP_ERR_HANDLING_MODE_NONE
        UCP_ERR_HANDLING_MODE_PEER

    ctypedef struct ucp_address_t:
        pass

    ctypedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil

    ctypedef struct ucp_err_handler_t:
        ucp_err_handler_cb_t cb
        void *arg

    ctypedef struct ucp_ep_params_t:
        uint64_t field_mask
        const ucp_address_t *address
        ucp_err_handling_mode_t err_mode
        ucp_err_handler_t err_handler

    ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep)

    ctypedef struct ucp_mem_map_params_t:
        uint64_t field_mask
        void *address
        size_t length
        unsigned flags
        ucs_memory_type_t memory_type

    ctypedef struct ucp_mem_attr_t:
        uint64_t field_mask
        void *address
        size_t length
        ucs_memory_type_t mem_type

    ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh)
    ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh)
    ucs_status_t ucp_mem_query(const ucp_mem_h memh, ucp_mem_attr_t *attr)

    ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **buffer, size_t *size)
    void ucp_rkey_buffer_release(void *buffer)
    ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *buffer, ucp_rkey_h *rkey)
    ucs_status_t ucp_rkey_ptr(ucp_rkey_h rkey, uint64_t remote_address, void **address)
    void ucp_rkey_destroy(ucp_rkey_h rkey)

    ctypedef struct ucp_context_attr_t:
        uint64_t field_mask
        uint64_t memory_types

    ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr)
    void ucp_ep_print_info(ucp_ep_h ep, FILE *stream)
    void ucp_context_print_info(ucp_context_h context, FILE *stream)
    unsigned ucp_worker_progress(ucp_worker_h worker)
