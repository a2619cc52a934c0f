{{/* A pod template of Ray; with (dict "root" . "group" "router"). */}}
{{- define "outrider.podTemplate" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $values := get $root.Values.groups $group -}}
{{- $head := eq $group "head" -}}
{{- $selector := include "outrider.selector" (list $root $group) -}}
{{- $ending := include "outrider.ending" (list $root $group) | fromJson -}}
metadata:
  labels:
    {{- $selector | nindent 4 }}
    {{- with $values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  serviceAccountName: {{ include "outrider.account" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $ending.grace }}
  securityContext:
    {{- include "outrider.podSecurity" $root | nindent 4 }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.spreadOver }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
  {{- end }}
  {{- if $head }}
  initContainers:
    # Says in one line what would keep the service from starting.
    - name: plan
      image: {{ include "outrider.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [outrider, plan, --config, /etc/outrider/settings/outrider.yaml, --pods, /etc/outrider/settings/pods.yaml]
      {{- include "outrider.containerCommon" . | nindent 6 }}
  {{- end }}
  containers:
    - name: {{ $head | ternary "ray-head" "ray-worker" }}
      image: {{ include "outrider.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        {{- include "outrider.containerPorts" . | nindent 8 }}
      {{- include "outrider.probes" . | nindent 6 }}
      {{- if eq $group "router" }}
      # Ray ends at once when the pod is told to; so its router ends its streams before. Streams of verifiers move by themselves.
      lifecycle:
        preStop:
          exec:
            command: [outrider, leave, --name, {{ include "outrider.application" $root }}, --timeout, {{ $ending.leave | toString | quote }}]
      {{- end }}
      {{- include "outrider.containerCommon" . | nindent 6 }}
  volumes:
    {{- include "outrider.volumes" . | nindent 4 }}
{{- end -}}

{{/* KubeRay refuses a head without a port called serve, though nothing of ours listens there. */}}
{{- define "outrider.containerPorts" -}}
{{- $root := .root -}}
{{- if eq .group "head" -}}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: client, containerPort: 10001}
- {name: serve, containerPort: 8999}
{{- else if eq .group "router" -}}
- {name: grpc, containerPort: {{ include "outrider.grpcPort" $root }}}
{{- if $root.Values.service.http }}
- {name: http, containerPort: {{ include "outrider.httpPort" $root }}}
{{- end }}
- {name: ops, containerPort: 9464}
{{- end }}
- {name: metrics, containerPort: 8080}
{{- end -}}

{{/*
KubeRay puts a probe of Serve's proxy, which does not run here, where a worker has none of its own. A router is ready when it would
answer a request, which may take as long as a model loads: so nothing but Ray's health restarts a pod.
*/}}
{{- define "outrider.probes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  {{- if eq .group "router" }}
  httpGet: {path: /ready, port: ops}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
  {{- else }}
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
  {{- end }}
{{- end -}}

{{/* What the containers of a pod have in common: resources, environment, mounts, security. */}}
{{- define "outrider.containerCommon" -}}
{{- $root := .root -}}
{{- $values := get $root.Values.groups .group -}}
resources:
  {{- $resources := dict "cpu" $values.cpu "memory" $values.memory -}}
  {{- if gt (int $values.gpus) 0 -}}
  {{- $_ := set $resources $values.gpuResource (int $values.gpus) -}}
  {{- end -}}
  {{- $resources = mustMerge $resources $values.extraResources }}
  requests:
    {{- toYaml $resources | nindent 4 }}
  limits:
    {{- toYaml $resources | nindent 4 }}
env:
  {{- include "outrider.environment" . | nindent 2 }}
volumeMounts:
  {{- include "outrider.mounts" . | nindent 2 }}
securityContext:
  {{- include "outrider.containerSecurity" $values.capabilities | nindent 2 }}
{{- end -}}

{{- define "outrider.environment" -}}
{{- $root := .root -}}
{{- $values := get $root.Values.groups .group -}}
{{- $env := dict
  "HOME" "/tmp"
  "HF_HOME" (printf "%s/huggingface" $root.Values.storage.mountPath)
  "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" "0"
  "RAY_DEDUP_LOGS" "0"
  "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" ((include "outrider.ending" (list $root .group) | fromJson).drain | toString)
  "RAY_USAGE_STATS_ENABLED" "0"
-}}
{{- if not $root.Values.networkPolicy.fetchModels -}}
{{- $_ := set $env "HF_HUB_OFFLINE" "1" -}}
{{- end -}}
{{- range $name, $value := mustMergeOverwrite $env $values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- if eq .group "router" }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- if eq .group "head" }}
{{- if $root.Values.indexRedis.urlSecretName }}
- name: OUTRIDER_RETRIEVAL__REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $root.Values.indexRedis.urlSecretName }}, key: {{ $root.Values.indexRedis.urlSecretKey }}}}
{{- else if $root.Values.redis.index }}
- name: OUTRIDER_RETRIEVAL__REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $root.Values.redis.passwordSecretName }}, key: {{ $root.Values.redis.readerSecretKey }}}}
- name: OUTRIDER_RETRIEVAL__REDIS_URL
  value: redis://reader@{{ include "outrider.name" $root }}-redis:6379
{{- end }}
{{- if $root.Values.indexRedis.answersSecretName }}
- name: OUTRIDER_RETRIEVAL__ANSWERS_KEY
  valueFrom: {secretKeyRef: {name: {{ $root.Values.indexRedis.answersSecretName }}, key: {{ $root.Values.indexRedis.answersSecretKey }}}}
{{- end }}
{{- with $root.Values.learningRedis }}{{ if .passwordSecretName }}
- name: OUTRIDER_ROUTER__LEARNING_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .passwordSecretName }}, key: {{ .passwordSecretKey }}}}
{{- end }}{{ end }}
{{- with $root.Values.responsesRedis }}{{ if .passwordSecretName }}
- name: OUTRIDER_SERVER__STORED_RESPONSES_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .passwordSecretName }}, key: {{ .passwordSecretKey }}}}
{{- end }}{{ end }}
{{- end }}
{{- end -}}

{{/* Each group mounts the secrets that its components read; the head builds the application, so it reads the internal token. */}}
{{- define "outrider.secrets" -}}
{{- $values := .root.Values -}}
{{- $found := list -}}
{{- if eq .group "router" -}}
{{- with $values.apiKeys.secretName }}{{ $found = append $found (dict "name" "keys" "secret" . "path" "/etc/outrider/keys") }}{{ end -}}
{{- with $values.tls.secretName }}{{ $found = append $found (dict "name" "tls" "secret" . "path" "/etc/outrider/tls") }}{{ end -}}
{{- end -}}
{{- if eq .group "head" -}}
{{- with $values.internalToken.secretName }}{{ $found = append $found (dict "name" "internal-token" "secret" . "path" "/etc/outrider/internal-token") }}{{ end -}}
{{- end -}}
{{- $roles := get (dict "verifier" (list "verifier") "drafting" (list "drafter" "retrieval")) .group | default list -}}
{{- range $role := $roles -}}
{{- with get $values.componentTls $role }}{{ $found = append $found (dict "name" (printf "tls-%s" $role) "secret" . "path" (printf "/etc/outrider/component-tls/%s" $role)) }}{{ end -}}
{{- end -}}
{{- dict "found" $found | toJson -}}
{{- end -}}

{{- define "outrider.mounts" -}}
{{- /* Drafters and retrieval services are the least trusted: what they learn and fetch stays in their own pod. */}}
- {name: models, mountPath: {{ .root.Values.storage.mountPath }}{{ if eq .group "drafting" }}, readOnly: true{{ end }}}
- {name: temporary, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- if eq .group "head" }}
- {name: settings, mountPath: /etc/outrider/settings, readOnly: true}
{{- end }}
{{- range (include "outrider.secrets" . | fromJson).found }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "outrider.volumes" -}}
{{- $values := get .root.Values.groups .group -}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "outrider.claim" .root }}}
- name: temporary
  emptyDir: {sizeLimit: {{ $values.temporary }}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- if eq .group "head" }}
- name: settings
  configMap: {name: {{ include "outrider.name" .root }}-settings}
{{- if include "outrider.scales" .root }}
# The autoscaler's container alone talks to the API server.
- name: api-token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}
{{- end }}
{{- range (include "outrider.secrets" . | fromJson).found }}
- name: {{ .name }}
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
{{- end -}}
